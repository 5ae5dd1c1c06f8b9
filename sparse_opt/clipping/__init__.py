"""CowClip under the stock fused optimizers of any TorchRec model."""
