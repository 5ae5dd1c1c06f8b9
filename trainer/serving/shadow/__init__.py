"""A second model that predicts the same requests in a process of its own, to be compared with the served one."""
