"""TensorBoard, Weights & Biases and MLflow: what they show of a step."""
