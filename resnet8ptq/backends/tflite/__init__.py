"""TensorFlow Lite: TensorFlow's converter, and LiteRT's interpreter."""
