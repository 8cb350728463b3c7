"""TensorFlow support: :mod:`.rendezvous` sets ``TF_CONFIG``, which ``MultiWorkerMirroredStrategy`` reads."""
