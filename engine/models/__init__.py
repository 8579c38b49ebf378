"""Model families. Each turns a step batch over pool rows and slots into logits."""
