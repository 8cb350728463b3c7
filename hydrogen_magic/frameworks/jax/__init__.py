"""JAX support: :mod:`.rendezvous` makes ``jax.distributed.initialize()`` work without arguments."""
