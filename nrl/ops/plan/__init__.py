"""What a GPU would do in a training step, found out without one.

`driven.drive` runs the real engine on fake CUDA tensors in a process of its own and counts; `closed` has formulas, and
`gpus` has the numbers of devices, from which `gpus.estimate` makes a roofline.
"""
