"""Names, arguments and attributes of other libraries and of older versions, each with its answer."""
