"""Parameters as one flat vector: its layout, the vector and the module's parameters and buffers in it."""
