"""Images in: batches from tensors and loaders, image files."""
