"""The bundled checkpoint's recipe: corpus, model, training, export, evaluation."""
