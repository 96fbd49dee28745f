"""Arguments and attributes of the wrappers of Stochastic Gradient Push and WAGMA-SGD, and what they are called here."""
