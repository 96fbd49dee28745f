"""Pictures: of finished runs, from their files alone, and of communication graphs, from the library's matrices."""
