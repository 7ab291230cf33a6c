"""What the server does with the updates: weights, screening and one file for each aggregator."""
