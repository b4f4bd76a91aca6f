"""Modules made of operators. They hold weights as integer buffers, so that no cast of a module can change a stored bit."""
