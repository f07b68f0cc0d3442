"""What changes a trained model afterwards: distillation from a teacher, and pruning."""
