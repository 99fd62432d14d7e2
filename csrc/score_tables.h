// LFPS's score tables (saccade/methods/lfps/tables.py says what they mean): candidates, what a step adds, and who needs
// neither.
#pragma once

#include "sink_share.h"
#include "table_gain.h"
#include "table_scan.h"
