"""What this machine is and what we may use of it: processor, memory, limits, processes, versions.

Every reader takes the root that /proc and /sys are under, so that tests hand it a fixture tree.
"""

from moet.machine.cpu import Cpu, usable_cpus, usable_threads
from moet.machine.memory import Memory
from moet.machine.snapshot import Machine, read_machine

__all__ = ["Cpu", "Machine", "Memory", "read_machine", "usable_cpus", "usable_threads"]
