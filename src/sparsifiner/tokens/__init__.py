"""Token pruning: blocks that drop tokens, so that every later layer runs on fewer."""
