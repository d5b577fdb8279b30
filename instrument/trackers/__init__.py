"""TensorBoard, Weights & Biases, MLflow and Trackio: what they show of a step."""
