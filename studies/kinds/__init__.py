"""`resnet8ptq ship` on networks of many kinds, beside single recipes and other tools."""
