"""Building blocks of models: embedding collections and their configs, feature processors, dense layers."""
