"""The memory and the time of a training step on GPUs, estimated without one.

`simulate.simulate_step` runs the real engine on fake CUDA tensors in a process of its own and counts; `analytic` has
closed forms, and `gpus` the data of devices, from which `gpus.estimate` makes a roofline.
"""
