"""Images in: batches from tensors and loaders, files through timm's readers."""
