"""The trackers TensorBoard, Weights & Biases, MLflow and Trackio, and the values of a step that they show."""
