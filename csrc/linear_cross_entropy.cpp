#include "stable.h"
