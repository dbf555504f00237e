"""Looking at a converted model without changing it: captures, statistics, multiply-adds, comparisons."""
