"""DeepSpeed support: ``python -m hydrogen_magic deepspeed build`` compiles operators ahead of a gang."""
