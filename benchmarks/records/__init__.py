"""Records: how fast a method trains a small model to a fixed loss, by the Lab's clock. See README.md here."""
