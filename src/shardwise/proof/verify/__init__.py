"""Every sharding rule, judged by brute force."""
