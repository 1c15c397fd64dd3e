"""Links between hosts: existing engines that move the bytes of collectives."""
