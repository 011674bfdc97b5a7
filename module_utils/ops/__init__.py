# SPDX-License-Identifier: GPL-3.0-or-later
"""Operations core: what modules, units and tests share. Standard library only, Python 3.9 and later."""
