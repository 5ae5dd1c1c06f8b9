"""Large-batch CTR training on TorchRec with CowClip."""
