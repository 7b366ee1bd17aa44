"""The paper's four figures: softmax regression on Fashion-MNIST under delays."""
