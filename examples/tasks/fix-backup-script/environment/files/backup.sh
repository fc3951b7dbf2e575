#!/bin/bash
# Usage: backup.sh SOURCE TARGET
count=0
for f in $(find $1 -name *.txt); do
  cp $f $2/$(basename $f).bak
  count=$((count + 1))
done
echo $count
