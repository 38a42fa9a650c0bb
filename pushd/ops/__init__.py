"""What operators touch: metrics and status over HTTP, and the commands beside `serve`."""
