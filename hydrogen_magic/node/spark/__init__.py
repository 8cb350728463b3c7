"""Programs that Spark runs on its machines. They are sent as source and import none of our modules."""
