"""Programs that are interrupted on purpose."""

import signal

# A job in a shell's background ignores Ctrl-C, and so would all programs that tests start in it
signal.signal(signal.SIGINT, signal.default_int_handler)
