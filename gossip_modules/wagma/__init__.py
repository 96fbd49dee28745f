"""WAGMA-SGD: groups average without waiting for late members."""
