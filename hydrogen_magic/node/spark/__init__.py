"""Programs that Spark runs on its machines. They are sent as text and import nothing of ours."""
