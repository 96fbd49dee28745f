"""Names of other libraries: arguments, methods and attributes, and what becomes of them here."""
