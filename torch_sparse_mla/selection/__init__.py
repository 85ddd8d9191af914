"""Selection plan: from the rows' top-k positions, the records that a DCP group must bring together, and from where.

takes: top-k lists of global positions, block tables. gives: a plan (unions by owner, remapped lists, slots to send).
Reading order: plan (the buffer and its views) -> contract -> reference -> triton_kernels -> api.
"""

from .plan import SelectionPlan, selection_plan_words

__all__ = ["SelectionPlan", "selection_plan_words"]
