"""Where the memory of a training step goes: what each module saves and needs, and when.

report = pc.memory.trace(model, x)      # a step, measured; fake=True: predicted, at any size
report.peak, report.fits("24GiB")
print(report)                           # or report.print(), in colour
report.save("step.html")                # or .json, .csv, .md, .png, .svg, .pdf
compare({"stock": one, "converted": other})
"""

from .compare import Comparison, compare
from .records import Held, ModuleFacts, Peak, Stretch, Trace
from .report import MemoryReport
from .trace import trace

__all__ = ["Comparison", "Held", "MemoryReport", "ModuleFacts", "Peak", "Stretch", "Trace", "compare", "trace"]
