from accel_train.cli import program

if __name__ == "__main__":
    program()
