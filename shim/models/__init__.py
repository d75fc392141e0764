"""What several guards have to know about models: their names, files, weights and caches."""
