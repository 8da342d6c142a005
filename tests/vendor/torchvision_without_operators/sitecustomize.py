"""For an environment whose torchvision was built for another torch: what transformers and vLLM
import of it needs none of its compiled operators, but it looks for them when it is imported.
"""

import sys
import types

sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
