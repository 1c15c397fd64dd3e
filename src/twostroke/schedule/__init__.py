"""Who computes which tokens next: plan() and commit(), and the policies between them."""
