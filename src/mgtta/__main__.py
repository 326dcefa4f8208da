from mgtta.cli import main

main()
