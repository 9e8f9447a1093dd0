"""From finished groups to the next policy: packing, optimizer, update, checkpoint."""
