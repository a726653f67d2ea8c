"""TensorFlow Lite."""
