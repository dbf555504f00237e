"""The page of `sparsifiner explore`: one image, one layer, one head, one patch, and what it attends to."""
