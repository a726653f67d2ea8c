"""`resnet8ptq ship` on networks of many kinds, compared with single recipes and other tools."""
