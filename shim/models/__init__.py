"""Facts about models that several guards use: their names, files, weights and caches."""
