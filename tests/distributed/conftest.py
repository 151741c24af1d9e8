from __future__ import annotations

import sys
from pathlib import Path

# Test modules share the helpers that stand beside them.
sys.path.insert(0, str(Path(__file__).parent))
