"""The live state of one `init`: epoch, communicators, process sets, lanes, devices."""
