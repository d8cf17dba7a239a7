"""The checks of ``nrl doctor``: does this machine, or this cluster, run nrl, and if not, what is to be done?

A check is a function from what a machine is (`nrl.runtime.node.machine.facts`) to `findings.Finding`\\ s. The doctor is
a list of them: `hardware` judges facts alone, so it judges those of other hosts, too; `installation` and `surroundings`
look around on this one. `running` runs them at once, each within its time. `cluster` asks all hosts of a Ray cluster
and compares them, and `between` lets each two of them meet.
"""
